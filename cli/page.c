/* page.c - the page at `/` of `k3 serve`: one conversation, streamed, thinking folded. It asks nobody but this server.
 *
 * A line of the page is a text here, since C99 promises no longer ones.
 */
#include "cli/page.h"

#include <stddef.h>

const char *const PAGE[] = {
    "<!doctype html><meta charset=\"utf-8\"><meta name=\"viewport\" "
    "content=\"width=device-width\"><title>k3</title>\n",
    "<style>\n",
    "body{font:16px/1.5 system-ui,sans-serif;margin:0 auto;max-width:46rem;padding:1rem;color:#222;"
    "background:#fff}\n",
    ".m{margin:.7rem 0;padding:.6rem .9rem;border-radius:.5rem;white-space:pre-wrap;"
    "overflow-wrap:anywhere}\n",
    ".user{background:#e8eefc}.assistant{background:#f3f3f3}.error{background:#fde8e8}\n",
    "details{color:#666;font-size:.9em}small{color:#666}\n",
    "textarea{width:100%;box-sizing:border-box;font:inherit;padding:.5rem}\n",
    "button{font:inherit;margin-right:.5rem}\n",
    "@media(prefers-color-scheme:dark){body{background:#1b1b1b;color:#ddd}.user{background:#26324a}"
    ".assistant{background:#2a2a2a}.error{background:#4a2626}textarea{background:#222;color:#ddd}}\n",
    "</style>\n",
    "<h1>k3 <small id=\"model\"></small></h1>\n",
    "<div id=\"log\"></div>\n",
    "<form id=\"f\"><textarea id=\"t\" rows=\"3\" placeholder=\"Say something; Enter sends, Shift+Enter is a "
    "new line\" autofocus></textarea>\n",
    "<p><button id=\"send\">Send</button><button type=\"button\" id=\"stop\" disabled>Stop</button><button "
    "type=\"button\" id=\"retry\" disabled>Retry</button><button type=\"button\" id=\"edit\" disabled>Edit "
    "last</button><button type=\"button\" id=\"clear\">New</button> <small id=\"say\"></small></p></form>\n",
    "<script>\n",
    "\"use strict\";\n",
    "const $=id=>document.getElementById(id);\n",
    "let talk=[],work=null;\n",
    "const key=()=>{let k=sessionStorage.k3key;return k?{\"Authorization\":\"Bearer \"+k}:{}};\n",
    "function box(role,text){const d=document.createElement(\"div\");d.className=\"m \"+role;"
    "d.textContent=text;$(\"log\").append(d);return d}\n",
    "function draw(){$(\"log\").replaceChildren();for(const m of talk)box(m.role,m.content)}\n",
    "function buttons(){const busy=!!work;$(\"send\").disabled=busy;$(\"stop\").disabled=!busy;"
    "$(\"retry\").disabled=$(\"edit\").disabled=busy||!talk.some(m=>m.role==\"user\")}\n",
    "async function answer(){\n",
    "  const d=box(\"assistant\",\"\"),think=document.createElement(\"details\"),"
    "sum=document.createElement(\"summary\"),tt=document.createElement(\"div\"),"
    "text=document.createElement(\"div\");\n",
    "  sum.textContent=\"thinking\";think.append(sum,tt);think.hidden=true;d.append(think,text);\n",
    "  work=new AbortController();buttons();\n",
    "  const start=Date.now();let first=0,n=0,content=\"\",reason=\"\";\n",
    "  const clock=setInterval(()=>{const s=(Date.now()-start)/1000;$(\"say\").textContent=first?n+\" parts,"
    " \"+(n/((Date.now()-first)/1000||1)).toFixed(1)+\" a second\":\"reading the prompt, \"+s.toFixed(0)+\" s\"}"
    ",500);\n",
    "  try{\n",
    "    const r=await fetch(\"/v1/chat/completions\",{method:\"POST\",signal:work.signal,"
    "headers:Object.assign({\"Content-Type\":\"application/json\"},key()),body:JSON.stringify({messages:talk,"
    "stream:true,stream_options:{include_usage:true}})});\n",
    "    if(r.status==401){const k=prompt(\"This server wants an API key\");if(k)sessionStorage.k3key=k}\n",
    "    if(!r.ok)throw new Error((await r.json()).error.message);\n",
    "    const read=r.body.pipeThrough(new TextDecoderStream()).getReader();let rest=\"\";\n",
    "    for(;;){\n",
    "      const {done,value}=await read.read();if(done)break;\n",
    "      const lines=(rest+value).split(\"\\n\\n\");rest=lines.pop();\n",
    "      for(const line of lines){\n",
    "        if(!line.startsWith(\"data: \")||line==\"data: [DONE]\")continue;\n",
    "        const o=JSON.parse(line.slice(6));if(o.error)throw new Error(o.error.message);\n",
    "        if(o.usage)$(\"say\").textContent=o.usage.completion_tokens+\" tokens, "
    "\"+(o.usage.completion_tokens/((Date.now()-first)/1000||1)).toFixed(1)+\" a second; prompt "
    "\"+o.usage.prompt_tokens+\", \"+o.usage.prompt_tokens_details.cached_tokens+\" kept\";\n",
    "        const c=o.choices[0];if(!c)continue;\n",
    "        if(c.delta.reasoning_content){reason+=c.delta.reasoning_content;tt.textContent=reason;"
    "think.hidden=false}\n",
    "        if(c.delta.content){content+=c.delta.content;text.textContent=content}\n",
    "        if(c.delta.content||c.delta.reasoning_content){n++;first=first||Date.now()}\n",
    "        if(c.finish_reason==\"length\")box(\"error\",\"The answer was cut: its limit was reached.\");\n",
    "      }\n",
    "    }\n",
    "  }catch(e){if(e.name!=\"AbortError\")box(\"error\",e.message)}\n",
    "  clearInterval(clock);work=null;\n",
    "  if(content)talk.push({role:\"assistant\",content});\n",
    "  buttons();\n",
    "}\n",
    "$(\"f\").onsubmit=e=>{e.preventDefault();const t=$(\"t\").value.trim();if(!t||work)return;"
    "$(\"t\").value=\"\";talk.push({role:\"user\",content:t});box(\"user\",t);answer()};\n",
    "$(\"t\").onkeydown=e=>{if(e.key==\"Enter\"&&!e.shiftKey){e.preventDefault();$(\"f\").requestSubmit()}};\n",
    "$(\"stop\").onclick=()=>work&&work.abort();\n",
    "function back(){while(talk.length&&talk[talk.length-1].role!=\"user\")talk.pop()}\n",
    "$(\"retry\").onclick=()=>{back();draw();answer()};\n",
    "$(\"edit\").onclick=()=>{back();$(\"t\").value=talk.pop().content;draw();buttons();$(\"t\").focus()};\n",
    "$(\"clear\").onclick=()=>{if(work)work.abort();talk=[];draw();buttons();$(\"say\").textContent=\"\"};\n",
    "fetch(\"/props\",{headers:key()}).then(r=>r.json()).then(p=>$(\"model\").textContent=p.model+\", context "
    "\"+p.n_ctx).catch(()=>{});\n",
    "buttons();\n",
    "</script>\n",
    NULL,
};
