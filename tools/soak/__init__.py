"""Hours of epochs in minutes: does anything grow?"""
