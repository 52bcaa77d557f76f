"""Training curves of different runs, machines and programs: read, aligned, drawn and judged."""
