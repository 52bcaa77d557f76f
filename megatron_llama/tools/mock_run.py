"""What tools override in a run whose ranks they start without training anything."""

NO_FILES = ("data.mock=true", "data.prefixes=[]", "data.tokenizer=null", "data.prepare=null")
# The graphs and the collectives of a step depend on none of it. Placed last on the command line, so that it wins.
MOCK_RUN = (
    *NO_FILES,
    "trainer.epochs=null",
    "trainer.max_restarts=0",
    "logging.tensorboard=false",
    "logging.csv=false",
    "logging.wandb=off",
    "logging.sample_prompts=[]",
)
