"""gRPC: expertd.v1, health, reflection, channelz, AdminService and WeightsService."""
