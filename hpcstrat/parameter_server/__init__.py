"""Parameter servers: some ranks hold the variables, and other ranks use them.

``mailbox`` and ``wakeup_pipes`` send messages and wake sleeping ranks. ``server`` and
``shared_files`` run on servers. ``client``, ``server_variables``, ``server_slots``,
``server_steps``, ``pieces`` and ``lookup`` run on the ranks that use the servers.
``handles`` pickles functions that refer to variables.
"""
