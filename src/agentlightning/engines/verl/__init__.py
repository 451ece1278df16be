"""The engine `verl`: sampling and learning on verl, on one machine or on many, with our loop in charge."""
