"""Variables that live on ranks of their own: servers, messages, handles.

bells, mailbox
    How ranks are woken, and what they send.
memory, server
    What a server holds, in memory that its node may read, and what it does.
client, variables, lookup, gradients
    What the coordinator and workers do with it.
handles
    Functions with variables inside, as they travel.
"""
