"""One concept a file; each mixer has the same three ways through tokens (see docs/architecture.md)."""
