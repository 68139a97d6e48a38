"""Several hosts: tests over network namespaces of this machine; they need root."""
