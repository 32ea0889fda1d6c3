"""Ports that the router forwards because this peer asked it to: NAT-PMP (RFC 6886) and UPnP."""
