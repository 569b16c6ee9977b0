#!/bin/sh
# Where the job named $1 stands, in the one word that Snakemake expects.
if ! conditions=$(kubectl get job "$1" -o 'jsonpath={.status.conditions[?(@.status=="True")].type}' 2>&1); then
    case $conditions in
        *NotFound*) echo failed ;; # deleted by somebody
        *) echo running ;;         # the cluster does not answer: ask again
    esac
    exit 0
fi
case $conditions in
    *Complete*) echo success ;;
    *Fail*) echo failed ;;
    *) echo running ;;
esac
