"""expertd.v1: the generated classes of expert_service.proto.  Regenerate them with `make proto`; never edit them."""
