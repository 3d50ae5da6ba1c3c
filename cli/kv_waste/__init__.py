"""`baton kv-waste`: what each way of allocating KV memory wastes, on the same requests.

workload (trace or distribution) -> replay, once for each policy -> report, table or picture.
Nothing here needs torch or a model.
"""
