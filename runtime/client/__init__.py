"""How a server speaks to an engine, wherever it runs: commands and events as plain data.

``EngineClient`` lives on an event loop and gives out generations. ``EngineLoop`` owns an engine. A host carries
messages between the two: a thread of this process (``ThreadHost``) or another process (``ProcessHost``).
"""
