"""What adapters of inference engines share: who computes a model's experts, and one layer as one rank calls it.

    served      who computes: addresses, a placement, a forwarder; and whether they serve this very model
    settings    the same, as a user writes it in an engine's configuration or in the environment
    layer       one layer of one rank: its share of the tokens, no padding, shared experts meanwhile
    versions    which versions of an engine an adapter works with; signatures: what a package's source has under a name

The adapters are expertd_client.transformers, .vllm and .sglang.
"""
