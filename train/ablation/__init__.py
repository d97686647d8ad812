"""Many runs that differ in a few settings: the grid, its runs in processes of their own, and their records."""
