# Double of kind that records whether its cluster was created.
case "$*" in
  "get clusters") test ! -e made-cluster || echo evergreen ;;
  "create cluster "*) touch made-cluster ;;
esac
