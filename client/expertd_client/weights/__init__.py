"""New weights for servers, while they serve: for trainers and for operators (docs/weights.md).

with Updater(["10.0.0.1:50051", "10.0.0.2:50051"]) as updater:
    with updater.version(7, label="step 7000") as update:
        update.put_all(expert_tensors(model))           # of transformers 5; others: (name in the checkpoint, tensor)
"""

from expertd.errors import UpdateFailedError
from expertd_client.weights.deltas import DeltaFolder, publish_delta_folder
from expertd_client.weights.fused import expert_tensors
from expertd_client.weights.server import WeightsServer
from expertd_client.weights.sync import WeightSync
from expertd_client.weights.updater import Update, Updater

__all__ = [
    "DeltaFolder",
    "Update",
    "UpdateFailedError",
    "Updater",
    "WeightSync",
    "WeightsServer",
    "expert_tensors",
    "publish_delta_folder",
]
