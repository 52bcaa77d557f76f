"""How many parameters each preset has."""

from __future__ import annotations

PUBLISHED = {
    "llama7b": 6_738_415_616,
    "llama13b": 13_015_864_320,
    "llama70b": 68_976_648_192,
    "llama3_1b": 1_235_814_400,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "smollm2_135m": 134_515_008,
    "llama_15m": 15_191_712,  # stories15M
    "llama_110m": 109_529_856,  # stories110M
}
OURS = {"llama_2m": 1_771_200, "llama_56m": 55_976_448}
