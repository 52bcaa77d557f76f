"""Converter of NeMo, neuronx-nemo-megatron and NxDT configs: ``scripts/import_config.py``."""
