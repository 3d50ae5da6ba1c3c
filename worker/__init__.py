"""What prefill and decode workers share: assembly, registration, admin port, drain, spans."""
