"""What is proved of the schemes and the package itself does not call: the tests and scripts/reproduction use it."""
