"""Models of the transformers library whose experts live on expertd's servers.

    model = load_without_experts("path/to/checkpoint", "127.0.0.1:50051")    # expert weights are neither read nor made
    model.generate(...)

    attach(model, "127.0.0.1:50051")     # a model that was loaded whole: its experts are set aside
    detach(model)                        # and put back

pip install '.[transformers]' in a checkout; versions.ADAPTER has the versions of transformers.  Another one is taken
with a warning where what is used of it has not changed, and refused when this package is imported where it has.
"""

from expertd_client.transformers.attach import Attachment, attach, detach
from expertd_client.transformers.load import load_without_experts
from expertd_client.transformers.versions import ADAPTER

__all__ = ["Attachment", "attach", "detach", "load_without_experts"]

ADAPTER.check()
