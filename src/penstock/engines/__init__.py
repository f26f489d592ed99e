"""Engines that distribute runs to hosts on several machines; the port is `penstock.hosting.engine`."""
