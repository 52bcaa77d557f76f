"""From the YAML files of NeMo, neuronx-nemo-megatron and NxDT to ours: ``scripts/import_config.py``."""
