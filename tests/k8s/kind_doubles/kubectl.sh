# Double of kubectl that renders with the real kubectl, stores applied objects, and records the lake's Job.
case "$*" in
  "kustomize "*) cd "$REPOSITORY" && exec "$REAL_KUBECTL" "$@" ;;
  *" apply -f -") cat > applied.yaml ;;
  *" get job simulated-lake") test -e made-lake ;;
  *" create job simulated-lake "*) touch made-lake ;;
  *" exec deployment/monitor "*) printf 'ctr_monitor_%s 1\n' 'rolling_auc{version="1"}' \
      'retrain_requests_total{outcome="started"}' 'retrain_requests_total{outcome="released"}' ;;
esac
