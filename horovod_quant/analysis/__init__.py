"""Performance model and recommendations of `advise`."""
