"""Many runs that differ in a few settings: the grid, its runs in processes of their own, their records, and what these
say: statistics, figures, tables."""
