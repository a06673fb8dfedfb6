"""The commands of ``qserve``: their options and what they call, in a file for each or for a few that belong together.

Every heavy import is inside the command that needs it, to keep ``--help`` fast.
"""
