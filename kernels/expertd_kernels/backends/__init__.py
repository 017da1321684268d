"""The rows' packers and kernels: a module a row of the table, and what several of them share."""
