"""Which backend serves a layer, and why not the others: rows of facts, rules, a decision.  Imports no torch."""
