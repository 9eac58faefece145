"""The steps of a plan: what is done to a model, as data that knows how it is done.

Each names a module by its full name and says what becomes of it. A new kind of step is a class here: nothing else lists
them.
"""
