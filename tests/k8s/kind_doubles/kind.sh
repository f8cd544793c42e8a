# Knows whether its cluster was made.
case "$*" in
  "get clusters") test ! -e made-cluster || echo evergreen ;;
  "create cluster "*) touch made-cluster ;;
esac
