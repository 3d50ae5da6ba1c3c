import os

# gRPC reads this when it is imported. `up` starts children beside gRPC servers, and a child uses no
# gRPC before its exec: with fork support gRPC would complain on stderr about each of them.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
