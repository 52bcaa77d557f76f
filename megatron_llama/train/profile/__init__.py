"""What a run's steps spend their time on: ``trainer.profile``. docs/profiling.md explains what it prints."""
