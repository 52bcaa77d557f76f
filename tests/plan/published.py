"""How many parameters each preset has: for published models, the sum over their safetensors files."""

from __future__ import annotations

PUBLISHED = {
    "llama7b": 6_738_415_616,
    "llama13b": 13_015_864_320,
    "llama70b": 68_976_648_192,
    "llama3_1b": 1_235_814_400,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "llama3.1/8b": 8_030_261_248,
    "llama3.1/70b": 70_553_706_496,
    "llama3.2/1b": 1_235_814_400,
    "llama3.2/3b": 3_212_749_824,
    "llama3.3/70b": 70_553_706_496,
    "qwen2.5/0.5b": 494_032_768,
    "qwen2.5/1.5b": 1_543_714_304,
    "qwen2.5/3b": 3_085_938_688,
    "qwen2.5/7b": 7_615_616_512,
    "qwen2.5/14b": 14_770_033_664,
    "qwen2.5/32b": 32_763_876_352,
    "qwen2.5/72b": 72_706_203_648,
    "qwen3/0.6b": 596_049_920,
    "qwen3/1.7b": 1_720_574_976,
    "qwen3/4b": 4_022_468_096,
    "qwen3/8b": 8_190_735_360,
    "qwen3/14b": 14_768_307_200,
    "qwen3/32b": 32_762_123_264,
    "olmo2/7b": 7_298_617_344,
    "olmo2/13b": 13_716_198_400,
    "olmo2/32b": 32_234_279_936,
    "smollm2_135m": 134_515_008,
    "llama_15m": 15_191_712,  # stories15M
    "llama_110m": 109_529_856,  # stories110M
}
OURS = {"llama_2m": 1_771_200, "llama_56m": 55_976_448}
