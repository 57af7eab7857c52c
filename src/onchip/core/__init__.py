"""What every op and command shares and none owns: choosing a backend, and what is here to run on."""
