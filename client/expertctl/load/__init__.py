"""`expertctl load`: the load generator, which experts are asked for, sweeps, the largest rate that keeps an SLO,
recordings, and reports."""
