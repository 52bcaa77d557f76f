"""Why a config is refused: rules about settings that must fit together, and about files that must be there."""
