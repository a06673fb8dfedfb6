"""The commands of ``qserve``: their options and what they call, a file for each or for a few that belong together.

Every heavy import is inside the command that needs it, so that asking for help is cheap.
"""
