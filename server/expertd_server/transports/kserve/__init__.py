"""The KServe endpoint: layers as models of the Open Inference Protocol, on gRPC."""
