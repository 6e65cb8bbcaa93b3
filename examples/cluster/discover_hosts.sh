#!/bin/sh
# List the hosts that an elastic job may use now, one name:workers per line. Here they are read from a file; on a
# cluster, ask its scheduler instead. It has to answer within seconds, and to list a host only while it can be reached.
exec cat "${HOSTS_FILE:-hosts}"
