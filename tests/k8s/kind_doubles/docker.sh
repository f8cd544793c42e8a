# Notes which containers and networks were made.
case "$*" in
  "inspect "*) test -e made-registry && echo true ;;
  "run "*) touch made-registry ;;
  "network inspect "*) test -e made-network && echo evergreen-registry ;;
  "network connect "*) touch made-network ;;
  "exec -i "*) cat > hosts.toml ;;
esac
