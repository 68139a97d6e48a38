"""Parameter servers: ranks that hold variables, and the ranks that use these.

``mailbox`` and ``wakeup_pipes`` carry messages and wake ranks; ``server`` and
``shared_files`` are on servers; ``client``, ``server_variables``, ``server_slots``,
``server_steps``, ``pieces`` and ``lookup`` on ranks that use them; ``handles`` pickles
functions that refer to variables.
"""
