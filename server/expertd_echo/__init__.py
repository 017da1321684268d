"""A server without experts, for measurements: `expertd-echo`, or `python -m expertd_echo`.

It answers every request with the request's own hidden states.  `expertctl bench path` starts one and measures it; on
another host, start it there and name its address.  Nothing else imports this package.
"""
