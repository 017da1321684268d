"""What every package uses: bounds, dtypes, ranges, tables, trace contexts, the allocator."""
