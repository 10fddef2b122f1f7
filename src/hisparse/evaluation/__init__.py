"""Does a model find what it is asked for, and were the rows that its answers rest on fetched from the host?"""
