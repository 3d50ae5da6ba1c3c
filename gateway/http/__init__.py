"""The OpenAI-compatible front: the same parser and pipeline as gRPC behind HTTP and SSE."""
