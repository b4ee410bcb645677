{{/* Names, labels, images: what every object has. Components are "gateway", "worker" and "test".
Whatever a person names is quoted where it stands: a Secret may be called 123, and a namespace true. */}}

{{- define "hotspare.name" -}}
{{- regexReplaceAll "[^a-z0-9]+$" (default .Chart.Name .Values.nameOverride | trunc 40) "" -}}
{{- end -}}

{{/* Short enough for a StatefulSet's pods, whose labels carry it with a hash. Dots would be no Service's name. What is cut
short has a hash of the whole, so that two releases whose names begin alike have other objects. */}}
{{- define "hotspare.fullname" -}}
{{- $name := include "hotspare.name" . -}}
{{- $full := .Release.Name -}}
{{- if not (contains $name .Release.Name) -}}{{- $full = printf "%s-%s" .Release.Name $name -}}{{- end -}}
{{- $full = default $full .Values.fullnameOverride -}}
{{- $name := $full | replace "." "-" -}}
{{- if gt (len $name) 40 -}}{{- $name = printf "%s-%s" (regexReplaceAll "-+$" (trunc 31 $name) "") ($full | sha256sum | trunc 8) -}}{{- end -}}
{{- $name -}}
{{- end -}}

{{- define "hotspare.gateway" -}}{{ include "hotspare.fullname" . }}-gateway{{- end -}}
{{- define "hotspare.worker" -}}{{ include "hotspare.fullname" . }}-worker{{- end -}}

{{/* (list root component) */}}
{{- define "hotspare.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "hotspare.name" $root | quote }}
app.kubernetes.io/instance: {{ $root.Release.Name | quote }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* (list root component): the labels of the chart's own, which no value may set. */}}
{{- define "hotspare.ownLabels" -}}
{{- $root := index . 0 -}}
{{ include "hotspare.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: hotspare
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* (list root component more...): with those of the values. */}}
{{- define "hotspare.labels" -}}
{{- $root := index . 0 -}}
{{ include "hotspare.ownLabels" . }}
{{- with include "hotspare.merged" (prepend (slice . 2) $root.Values.commonLabels) }}
{{ . }}
{{- end }}
{{- end -}}

{{/* A list of maps, as one in YAML; "" if there is nothing in them. The last one wins: no key may be there twice. */}}
{{- define "hotspare.merged" -}}
{{- $all := dict -}}
{{- range . -}}{{- range $name, $text := . -}}{{- $_ := set $all $name $text -}}{{- end -}}{{- end -}}
{{- with $all -}}{{ toYaml . }}{{- end -}}
{{- end -}}

{{/* (list root component) */}}
{{- define "hotspare.image" -}}
{{- $root := index . 0 -}}
{{- $image := index $root.Values.image (index . 1) -}}
{{- if $image.digest -}}{{ printf "%s@%s" $image.repository $image.digest }}
{{- else -}}{{ printf "%s:%s" $image.repository (default $root.Chart.AppVersion $image.tag) }}
{{- end -}}
{{- end -}}

{{/* (list root component): the labels of a pod. No versions: a new chart alone replaces no pod. */}}
{{- define "hotspare.podLabels" -}}
{{- $root := index . 0 -}}
{{ include "hotspare.selector" . }}
app.kubernetes.io/part-of: hotspare
{{- with include "hotspare.merged" (list $root.Values.commonLabels (index $root.Values (index . 1)).podLabels) }}
{{ . }}
{{- end }}
{{- end -}}

{{/* (list root component): what the pods of both have in common, by the values of that name. */}}
{{- define "hotspare.podSpec" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $values := index $root.Values $component -}}
enableServiceLinks: false
securityContext:
  {{- toYaml $root.Values.podSecurityContext | nindent 2 }}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  -
    {{- $selector := dict "labelSelector" (dict "matchLabels" (include "hotspare.selector" (list $root $component) | fromYaml)) }}
    {{- toYaml (merge (deepCopy .) $selector) | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* A quantity of bytes, as a whole number of them; "" if it is more than 1 PiB, which sums here could not bear. */}}
{{- define "hotspare.bytes" -}}
{{- $digits := regexFind "^[0-9]+" (toString .) -}}
{{- $number := regexReplaceAll "^0+" $digits "" | default "0" -}}
{{- $factors := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000
    "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $factor := get $factors (trimPrefix $digits (toString .)) | int64 -}}
{{- if and (le (len $number) 16) (le (int64 $number) (div 1125899906842624 $factor)) -}}
{{- mul (int64 $number) $factor -}}
{{- end -}}
{{- end -}}

{{/* The name that the gateways' certificate is held against. */}}
{{- define "hotspare.serverName" -}}
{{- default (printf "%s.%s.svc" (include "hotspare.gateway" .) .Release.Namespace) .Values.tls.serverName -}}
{{- end -}}

{{/* Where clients in the cluster find the gateways. */}}
{{- define "hotspare.url" -}}
{{ ternary "https" "http" (not (empty .Values.tls.existingSecret)) }}://{{ include "hotspare.gateway" . }}.{{ .Release.Namespace }}.svc:{{ .Values.gateway.service.port }}
{{- end -}}
