"""Published runs of other programs: their forecasts, and the fit of the planner's constants to them."""
