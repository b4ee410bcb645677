{{/* What processes are told: ports, variables, files. The variables are those of docs/settings.md. */}}

{{/* The ports are the chart's own: nobody else is in a pod's network. */}}
{{- define "hotspare.port.http" -}}8000{{- end -}}
{{- define "hotspare.port.serving" -}}8100{{- end -}}
{{/* Of the engine with that number, from 0. */}}
{{- define "hotspare.port.admin" -}}{{ add 8101 . }}{{- end -}}
{{/* Of the memory service of that device, from 0. */}}
{{- define "hotspare.port.gms" -}}{{ add 8109 . }}{{- end -}}

{{/* Letters of the engines, as a list in JSON. */}}
{{- define "hotspare.engines" -}}
{{- slice (list "a" "b" "c" "d" "e" "f" "g" "h") 0 (int (add 1 .Values.worker.shadows)) | toJson -}}
{{- end -}}

{{- define "hotspare.device" -}}{{ ternary "cuda" "cpu" .Values.gpu.enabled }}{{- end -}}

{{/* Name of the memory service's container of that device. */}}
{{- define "hotspare.gms" -}}{{ if eq (int .) 0 }}gms{{ else }}gms-{{ . }}{{ end }}{{- end -}}

{{/* What the pod's grace period leaves an engine's requests, unless it is given. */}}
{{- define "hotspare.shutdownTimeout" -}}
{{- $worker := .Values.worker -}}
{{- if kindIs "invalid" $worker.shutdownTimeoutSeconds -}}
{{- sub (sub $worker.terminationGracePeriodSeconds $worker.engineShutdownSeconds) (include "hotspare.workerMargin" .) -}}
{{- else -}}{{ $worker.shutdownTimeoutSeconds }}{{- end -}}
{{- end -}}

{{/* Of the pod's grace period: for keepers that end after their engines, and memory services after those. */}}
{{- define "hotspare.workerMargin" -}}10{{- end -}}
{{/* Of the gateway's: clients have two seconds to take what they are told at the end of a drain. */}}
{{- define "hotspare.gatewayMargin" -}}5{{- end -}}

{{/* Each list of variables has a name for itself, by which checks.yaml knows what extraEnv may not set again. */}}
{{- define "hotspare.commonEnv" -}}
- {name: HOTSPARE_LOG_FORMAT, value: {{ .Values.log.format | quote }}}
- {name: HOTSPARE_LOG_LEVEL, value: {{ .Values.log.level | quote }}}
- {name: HOTSPARE_RUN_DIR, value: /run/hotspare}
# The root is read-only: whoever keeps a cache does it here.
- {name: HOME, value: /tmp}
{{- end -}}

{{- define "hotspare.gatewayEnv" -}}
{{- $worker := include "hotspare.worker" . -}}
{{- $port := include "hotspare.port.serving" . -}}
- {name: HOTSPARE_HOST, value: {{ .Values.listenHost | quote }}}
- {name: HOTSPARE_PORT, value: {{ include "hotspare.port.http" . | quote }}}
- {name: HOTSPARE_PROCESSES, value: {{ .Values.gateway.processes | quote }}}
{{- if eq .Values.gateway.discovery "dns" }}
- {name: HOTSPARE_WORKERS_DNS, value: {{ printf "%s.%s.svc:%s" $worker .Release.Namespace $port | quote }}}
{{- else }}
- {name: HOTSPARE_WORKERS_KUBERNETES, value: {{ printf "%s/%s:%s" .Release.Namespace $worker $port | quote }}}
{{- end }}
- {name: HOTSPARE_DRAIN_TIMEOUT_SECONDS, value: {{ .Values.gateway.drainTimeoutSeconds | quote }}}
{{- if .Values.apiKeys.existingSecret }}
- {name: HOTSPARE_API_KEYS_FILE, value: /etc/hotspare/api-keys/keys}
{{- end }}
{{- if .Values.tls.existingSecret }}
- {name: HOTSPARE_TLS_CERTIFICATE, value: /etc/hotspare/tls/tls.crt}
- {name: HOTSPARE_TLS_KEY, value: /etc/hotspare/tls/tls.key}
{{- end }}
{{ include "hotspare.workerTokenEnv" . }}
{{- end -}}

{{- define "hotspare.workerTokenEnv" -}}
{{- if .Values.workerToken.existingSecret -}}
- {name: HOTSPARE_WORKER_TOKEN_FILE, value: /etc/hotspare/worker-token/token}
{{- end -}}
{{- end -}}

{{/* Where the pod is, by which engines and memory services find each other. */}}
{{- define "hotspare.podEnv" -}}
- name: HOTSPARE_POD
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- end -}}

{{/* (list root number) */}}
{{- define "hotspare.gmsEnv" -}}
{{- $root := index . 0 -}}
{{- $number := index . 1 -}}
- {name: HOTSPARE_GMS_DEVICE, value: {{ printf "%s:%d" (include "hotspare.device" $root) (int $number) | quote }}}
- {name: HOTSPARE_GMS_METRICS_HOST, value: {{ $root.Values.listenHost | quote }}}
- {name: HOTSPARE_GMS_METRICS_PORT, value: {{ include "hotspare.port.gms" $number | quote }}}
{{- if not $root.Values.gpu.enabled }}
# What would not fit into the container's memory is refused with a sentence, and not killed.
- {name: HOTSPARE_GMS_MEMORY_LIMIT, value: {{ include "hotspare.pagesBytes" $root | quote }}}
{{- end }}
{{- end -}}

{{/* (list root number) */}}
{{- define "hotspare.engineEnv" -}}
{{- $root := index . 0 -}}
{{- $number := int (index . 1) -}}
{{- $engine := $root.Values.engine -}}
{{- $worker := $root.Values.worker -}}
{{- $letters := include "hotspare.engines" $root | fromJsonArray -}}
{{- $others := list -}}
{{- range $other, $letter := $letters -}}
{{- if ne $other $number -}}{{- $others = append $others (include "hotspare.port.admin" $other) -}}{{- end -}}
{{- end -}}
- name: HOTSPARE_INSTANCE
  valueFrom: {fieldRef: {fieldPath: metadata.uid}}
- {name: HOTSPARE_HOST, value: {{ $root.Values.listenHost | quote }}}
- {name: HOTSPARE_SERVING_PORT, value: {{ include "hotspare.port.serving" $root | quote }}}
- {name: HOTSPARE_ENGINE, value: {{ $engine.name | quote }}}
- {name: HOTSPARE_ENGINE_ID, value: {{ index $letters $number | quote }}}
- {name: HOTSPARE_ADMIN_PORT, value: {{ include "hotspare.port.admin" $number | quote }}}
{{- with $others }}
- {name: HOTSPARE_STANDBY_ADMIN_PORTS, value: {{ join "," . | quote }}}
{{- end }}
- {name: HOTSPARE_DEVICE, value: {{ printf "%s:0" (include "hotspare.device" $root) | quote }}}
- {name: HOTSPARE_TENSOR_PARALLEL_SIZE, value: {{ $worker.tensorParallelSize | quote }}}
- {name: HOTSPARE_GRACE_PERIOD_SECONDS, value: {{ $worker.gracePeriodSeconds | quote }}}
- {name: HOTSPARE_SHUTDOWN_TIMEOUT_SECONDS, value: {{ include "hotspare.shutdownTimeout" $root | quote }}}
- {name: HOTSPARE_ENGINE_SHUTDOWN_SECONDS, value: {{ $worker.engineShutdownSeconds | quote }}}
- {name: HOTSPARE_CAPACITY, value: {{ int64 $engine.capacity | quote }}}
- {name: HOTSPARE_DTYPE, value: {{ $engine.dtype | quote }}}
- {name: HOTSPARE_MAX_MODEL_LEN, value: {{ int64 $engine.maxModelLen | quote }}}
- {name: HOTSPARE_KV_CACHE_BYTES, value: {{ int64 $engine.kvCacheBytes | quote }}}
{{- with $engine.servedModelName }}
- {name: HOTSPARE_SERVED_MODEL_NAME, value: {{ . | quote }}}
{{- end }}
{{- with $engine.engineArgs }}
- {name: HOTSPARE_ENGINE_ARGS, value: {{ . | quote }}}
{{- end }}
{{- if ne $root.Values.model.source "embedded" }}
- {name: HOTSPARE_MODEL, value: {{ printf "/models/%s" $root.Values.model.path | trimSuffix "/" | quote }}}
{{- end }}
{{- with include "hotspare.workerTokenEnv" $root }}
{{ . }}
{{- end }}
{{- end -}}

{{/* What a memory service may allocate on the host: weights and KV cache. */}}
{{- define "hotspare.pagesBytes" -}}
{{- add (include "hotspare.bytes" .Values.worker.gms.weights) (int64 .Values.engine.kvCacheBytes) -}}
{{- end -}}

{{/* Pages are populated by the memory service, and so charged to its container and to no engine's. */}}
{{- define "hotspare.gmsResources" -}}
{{- $gms := .Values.worker.gms -}}
{{- $bytes := include "hotspare.bytes" $gms.margin -}}
{{- if not .Values.gpu.enabled -}}{{- $bytes = add $bytes (include "hotspare.pagesBytes" .) -}}{{- end -}}
{{- $memory := printf "%dMi" (div (add $bytes 1048575) 1048576) -}}
{{- $split := dict "requests" (dict "cpu" $gms.cpu "memory" $memory) "limits" (dict "memory" $memory) -}}
{{- default $split $gms.resources | toYaml -}}
{{- end -}}

{{- define "hotspare.workerTokenVolume" -}}
{{- with .Values.workerToken -}}
{{- if .existingSecret -}}
- name: worker-token
  secret:
    secretName: {{ .existingSecret | quote }}
    items: [{key: {{ .key | quote }}, path: token}]
    defaultMode: 0440
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Each list of volumes and mounts has a name for itself, too, by which checks.yaml knows what values may not add. */}}
{{- define "hotspare.gatewayMounts" -}}
- {name: run, mountPath: /run/hotspare}
- {name: scratch, mountPath: /tmp}
{{- if .Values.apiKeys.existingSecret }}
- {name: api-keys, mountPath: /etc/hotspare/api-keys, readOnly: true}
{{- end }}
{{- if .Values.tls.existingSecret }}
- {name: tls, mountPath: /etc/hotspare/tls, readOnly: true}
{{- end }}
{{- if .Values.workerToken.existingSecret }}
- {name: worker-token, mountPath: /etc/hotspare/worker-token, readOnly: true}
{{- end }}
{{- end -}}

{{- define "hotspare.gatewayVolumes" -}}
- {name: run, emptyDir: {medium: Memory, sizeLimit: 16Mi}}
- {name: scratch, emptyDir: {sizeLimit: 256Mi}}
{{- with .Values.apiKeys }}
{{- if .existingSecret }}
- name: api-keys
  secret:
    secretName: {{ .existingSecret | quote }}
    items: [{key: {{ .key | quote }}, path: keys}]
    defaultMode: 0440
{{- end }}
{{- end }}
{{- with .Values.tls.existingSecret }}
- {name: tls, secret: {secretName: {{ . | quote }}, defaultMode: 0440}}
{{- end }}
{{- with include "hotspare.workerTokenVolume" . }}
{{ . }}
{{- end }}
{{- end -}}

{{/* (list root letter) */}}
{{- define "hotspare.engineMounts" -}}
{{- $root := index . 0 -}}
{{- $letter := index . 1 -}}
- {name: run, mountPath: /run/hotspare}
- {name: engine-{{ $letter }}-scratch, mountPath: /tmp}
{{- if gt (int $root.Values.worker.tensorParallelSize) 1 }}
- {name: engine-{{ $letter }}-shm, mountPath: /dev/shm}
{{- end }}
{{- if ne $root.Values.model.source "embedded" }}
- {name: model, mountPath: /models, readOnly: true}
{{- end }}
{{- if $root.Values.workerToken.existingSecret }}
- {name: worker-token, mountPath: /etc/hotspare/worker-token, readOnly: true}
{{- end }}
{{- end -}}

{{- define "hotspare.workerVolumes" -}}
# Lock, sockets and journal. They outlive each container, and end with the pod.
- {name: run, emptyDir: {medium: Memory, sizeLimit: 64Mi}}
# One for each container: each has pids of its own, and files that are named by a pid would be in each other's way.
{{- range $number := until (int .Values.worker.tensorParallelSize) }}
- {name: {{ include "hotspare.gms" $number }}-scratch, emptyDir: {sizeLimit: {{ $.Values.worker.scratchSize | quote }}}}
{{- end }}
{{- range include "hotspare.engines" . | fromJsonArray }}
- {name: engine-{{ . }}-scratch, emptyDir: {sizeLimit: {{ $.Values.worker.scratchSize | quote }}}}
{{- if gt (int $.Values.worker.tensorParallelSize) 1 }}
- {name: engine-{{ . }}-shm, emptyDir: {medium: Memory, sizeLimit: {{ $.Values.worker.shmSize | quote }}}}
{{- end }}
{{- end }}
{{- if eq .Values.model.source "claim" }}
- name: model
  persistentVolumeClaim:
    claimName: {{ .Values.model.claim.existingClaim | default (printf "%s-model" (include "hotspare.fullname" .)) | quote }}
    readOnly: true
{{- else if eq .Values.model.source "image" }}
- name: model
  image:
    reference: {{ .Values.model.image.reference | quote }}
    pullPolicy: {{ .Values.model.image.pullPolicy }}
{{- end }}
{{- with include "hotspare.workerTokenVolume" . }}
{{ . }}
{{- end }}
{{- end -}}

{{/* What a pod's claim for devices is made from. Its labels have no version: a new chart alone changes nothing here. */}}
{{- define "hotspare.claim" -}}
metadata:
  labels:
    {{- include "hotspare.selector" (list . "worker") | nindent 4 }}
spec:
  devices:
    requests:
      - name: devices
        exactly:
          deviceClassName: {{ .Values.gpu.deviceClassName | quote }}
          allocationMode: ExactCount
          count: {{ .Values.worker.tensorParallelSize }}
          {{- with .Values.gpu.selectors }}
          selectors:
            {{- range . }}
            - cel: {expression: {{ . | quote }}}
            {{- end }}
          {{- end }}
{{- end -}}

{{/* Name of that template: of what it says, and not of how it is written. */}}
{{- define "hotspare.claimTemplate" -}}
{{ include "hotspare.worker" . }}-devices-{{ include "hotspare.claim" . | fromYaml | toJson | sha256sum | trunc 8 }}
{{- end -}}
