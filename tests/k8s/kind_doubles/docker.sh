# Double of docker that records the created containers and networks.
case "$*" in
  "inspect "*) test -e made-registry && echo true ;;
  "run "*) touch made-registry ;;
  "network inspect "*) test -e made-network && echo evergreen-registry ;;
  "network connect "*) touch made-network ;;
  "exec -i "*) cat > hosts.toml ;;
esac
