"""Models of the transformers library whose experts live on expertd's servers.

    model = load_without_experts("path/to/checkpoint", "127.0.0.1:50051")    # expert weights are neither read nor made
    model.generate(...)

    attach(model, "127.0.0.1:50051")     # a model that was loaded whole: its experts are set aside
    detach(model)                        # and put back

Written for transformers 5.23 (pip install '.[transformers]' in a checkout).
"""

from expertd_client.transformers.attach import Attachment, attach, detach
from expertd_client.transformers.load import load_without_experts

__all__ = ["Attachment", "attach", "detach", "load_without_experts"]
