"""What a run will need and how fast it can be: predicted before it starts, checked against it afterwards."""
