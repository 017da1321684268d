"""`expertctl load` around its loop (expertd_client.load): which experts are asked for, sweeps, the largest rate that a
promise allows, and reports."""
