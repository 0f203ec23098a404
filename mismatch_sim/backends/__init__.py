"""What owns parameters: one module per framework, imported on demand (see ``types.Backend``)."""
